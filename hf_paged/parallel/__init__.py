"""One model over several ranks: layers, their loading, what ranks tell each other, and who starts whom."""
