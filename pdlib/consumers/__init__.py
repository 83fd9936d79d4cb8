"""What a decomposition is for: opening, plotting, exporting. Imports no training code."""
