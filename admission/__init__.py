"""What deserves to live where: policies shared by the live tiers and the trace replay."""
