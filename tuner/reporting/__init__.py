"""What people see of a tuning: progress while it runs; tables, a plot and ``report.html`` at its end."""
