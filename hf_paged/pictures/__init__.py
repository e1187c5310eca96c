"""Pictures and HTML of an engine's KV pool and counters. Imports no engine code."""
