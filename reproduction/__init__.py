"""The paper's tables and figures made again: ``python -m reproduction``."""
