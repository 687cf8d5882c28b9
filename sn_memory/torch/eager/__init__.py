"""Running a plan call by call: programs, their instructions, and trials."""
