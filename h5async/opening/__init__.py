"""Opens datasets: options enter; tables, orders, kinds of fields and budgets leave."""
