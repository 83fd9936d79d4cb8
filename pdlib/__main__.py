"""`python -m pdlib` is the command line."""

from pdlib.cli import main

if __name__ == "__main__":
    main()
