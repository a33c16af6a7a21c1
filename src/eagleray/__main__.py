"""`python -m eagleray`: the command line where its script may not be on PATH, as in a Ray job."""

from eagleray.cli.app import main

if __name__ == "__main__":
    main()
