"""Every method against its closed form."""
