"""Between AReaL and refitd: a facade for each engine, and the watch of its name-resolve record."""
