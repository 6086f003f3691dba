"""What is done with emitted programs: checked, compiled, and run again where the plan recomputes."""
