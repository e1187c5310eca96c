"""One model over several ranks: sharded layers, their loading, communication, and worker processes."""
