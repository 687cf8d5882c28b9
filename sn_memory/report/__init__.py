"""What a plan does, for people: tables, a picture, a page."""
