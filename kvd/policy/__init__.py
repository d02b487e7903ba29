"""Which block leaves next: one rule for both tiers, and the simulation that judges it."""
