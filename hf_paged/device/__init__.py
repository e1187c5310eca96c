"""Memory and properties of a device; knows no model."""
