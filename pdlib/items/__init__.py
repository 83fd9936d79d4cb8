"""What is stored: leaf and item contracts, the registry, and the Python types of the trees. Touches no disk but `specs/`."""
