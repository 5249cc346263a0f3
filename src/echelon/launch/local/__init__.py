"""The processes of one machine: started, watched from outside, and ended with the launcher."""
