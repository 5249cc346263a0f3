"""How a model trains on the ranks; one final class an engine behind one abstract seam."""
