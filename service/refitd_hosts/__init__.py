"""Ring 3: many hosts. They follow a hub or an object store; a hub pushes into a store; services form a group."""
