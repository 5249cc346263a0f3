"""What users read: messages on the terminal, in colour and in the user's language."""
