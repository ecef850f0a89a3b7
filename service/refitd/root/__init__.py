"""The root folder and who owns it: its mark, locks, directory handles, and threads that may hang in it."""
