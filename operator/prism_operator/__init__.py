"""The operator: PrismDeployment resources in, engine pods and an honest status out."""
