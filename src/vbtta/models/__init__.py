"""Statistical models, one folder each; `base.py` is their registry."""
