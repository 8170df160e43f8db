"""A user's own Pyro model of the labels."""
