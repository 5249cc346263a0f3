"""Names of other libraries, without behavior specific to echelon."""
