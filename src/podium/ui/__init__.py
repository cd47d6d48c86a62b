"""What people see: messages, progress, tables, figures."""
