"""What both framework rims share: measured choices, estimates, reserved memory."""
