"""Real trainers whose start-up is measured, each as its plain script and as its initopt version."""
