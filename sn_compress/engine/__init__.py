"""All tensors of one optimizer on one rank: what each step does with them, and what is kept.

May import `settings.py`, `schedule.py`, `report.py`, `sums`, `codecs`, `ops`, `devices` and `base`.
No framework, and not `prediction`: what measures and chooses is handed in.
"""
