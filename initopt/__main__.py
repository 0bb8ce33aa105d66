"""`python -m initopt` is the command `initopt`."""

from initopt.cli import main

if __name__ == "__main__":
    main()
