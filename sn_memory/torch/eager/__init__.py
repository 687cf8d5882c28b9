"""A plan carried out call by call: programs, their instructions, and what a trial of one shows."""
