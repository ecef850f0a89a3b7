"""Ring 4: what people look at: `refitd top`."""
