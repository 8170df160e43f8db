"""`python -m vbtta.cli` is `vbtta`."""

from vbtta.cli import main

if __name__ == "__main__":
    main()
