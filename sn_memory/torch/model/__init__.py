"""What a model is to a plan: its settings and inputs, and one step of it, run and put back."""
