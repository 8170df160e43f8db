"""Several models whose predictions are averaged."""
