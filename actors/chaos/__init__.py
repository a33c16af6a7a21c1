"""Faults on purpose: a plan of what is to be killed when, and what carries it out beside a run."""

from eagleray.actors.chaos.injector import Fired, Injector
from eagleray.actors.chaos.plan import ChaosPlan, Fault, load_plan

__all__ = ["ChaosPlan", "Fault", "Fired", "Injector", "load_plan"]
