"""The `eagleray` command: one module per group of verbs."""
