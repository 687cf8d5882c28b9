"""All tensors of one optimizer on one rank: what each step does with them, and what is kept.

Imports no framework, and not `prediction`: what measures and chooses is passed in.
"""
