"""The command line. One file for each group of commands; `app.py` puts them together."""
