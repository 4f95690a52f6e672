"""The configuration compiler: run, plan and profile files read with the position of every value, checked, completed, and explained."""
