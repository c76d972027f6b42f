"""Hold what is built on megarl beside the product: benches, studies, recipes of tasks, forecasts of schedules."""
