"""What is stored: contracts of leaves and items, their registry, the types of the trees. Reads no file but `specs/`."""
