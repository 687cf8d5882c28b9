"""What a plan does, for people: tables, a picture, a page.

It imports `base`, `graph`, `plan` and `check`.
"""
