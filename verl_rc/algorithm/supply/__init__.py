"""Which groups are admitted, trained on and booked: pure."""
