"""Where chunks live and how they move. Import from the modules here, or from `rootcellar`."""
