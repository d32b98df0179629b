// Package repotest holds tests of the repository itself: which package may import
// which, that everything exported is explained, that documentation names things that
// exist, and what must not be in a file. It has no code of its own.
package repotest
