"""Checkpoints: snapshots from the workers, the store actor, and what it keeps on storage."""
