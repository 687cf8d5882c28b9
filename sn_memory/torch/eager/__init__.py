"""Execution of a plan call by call: programs, their instructions, and a trial run."""
