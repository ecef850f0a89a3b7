"""What is in memory: fingerprints beside the copies (`contents`), slices of all ranks together (`slices`), and versions
that a GPU proves before they are loaded (`proving`).
"""
