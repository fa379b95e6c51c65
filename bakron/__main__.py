"""`python -m bakron` is the same as `bakron`."""

from bakron.cli import main

if __name__ == "__main__":
    main()
