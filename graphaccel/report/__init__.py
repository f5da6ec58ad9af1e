"""Reports about plans as text, page, JSON, trace and other systems' configs; changes no plan."""
