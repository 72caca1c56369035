"""Programs that measure and tune; nothing imports this package."""
