// Package config holds the small, pure decisions behind Baton's flags: how the
// cores of a machine are divided between workers ([DivideCores]), which ports are
// free ([FreePorts]) and how sizes are written ([ParseSize]).
package config
