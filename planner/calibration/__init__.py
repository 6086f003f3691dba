"""Measuring the machine that runs this: operators and collectives timed, curves fitted, a cluster file written."""

from planner.calibration.measure_machine import profile_machine

__all__ = ["profile_machine"]
