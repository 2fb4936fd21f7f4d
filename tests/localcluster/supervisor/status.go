package supervisor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"a.localcluster/layout"
)

// Health in one word, and the exit code of `status`.
type Health int

const (
	Ready      Health = 0
	NotReady   Health = 1 // it runs, but something of it does not
	NotRunning Health = 3 // as of other programs that report on services
)

func (h Health) String() string {
	return map[Health]string{Ready: "ready", NotReady: "not ready", NotRunning: "not running"}[h]
}

// Status of a cluster, as far as it can be known from outside.
type Status struct {
	Directory  string            `json:"directory"`
	Health     string            `json:"health"`
	Problem    string            `json:"problem,omitempty"` // why it is not ready
	API        string            `json:"api,omitempty"`
	Kubeconfig string            `json:"kubeconfig,omitempty"`
	Supervisor int               `json:"supervisorPID,omitempty"`
	Since      *time.Time        `json:"since,omitempty"`
	Components []ComponentStatus `json:"components,omitempty"`
	Nodes      []NodeStatus      `json:"nodes,omitempty"`
}

// ComponentStatus says by which process id a component is seen on the machine; nil: it is down at the moment.
type ComponentStatus struct {
	Name string `json:"name"`
	PID  *int   `json:"pid"`
}

type NodeStatus struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	Pods  int    `json:"pods"` // that have not ended
}

// Look finds out how the cluster in a directory is.
func Look(dir layout.Dir) (Status, Health) {
	s := Status{Directory: string(dir)}
	health, err := s.look(dir)
	if err != nil {
		s.Problem = err.Error()
	}
	s.Health = health.String()
	return s, health
}

func (s *Status) look(dir layout.Dir) (Health, error) {
	running, err := Running(dir)
	if err != nil || !running {
		return NotRunning, err
	}
	state, err := readState(dir)
	if err != nil {
		return NotReady, err
	}
	s.API, s.Supervisor, s.Since = fmt.Sprintf("https://127.0.0.1:%d", state.Options.Port), state.PID, &state.Started
	if s.Components, err = componentsOf(dir, state.Inner); err != nil {
		return NotReady, err
	}
	if _, err := os.Stat(dir.Kubeconfig()); err != nil {
		return NotReady, fmt.Errorf("still starting")
	}
	s.Kubeconfig = dir.Kubeconfig()
	if err := s.askAPI(dir); err != nil {
		return NotReady, err
	}
	for _, c := range s.Components {
		if c.PID == nil {
			return NotReady, fmt.Errorf("%s is down", c.Name)
		}
	}
	for _, n := range s.Nodes {
		if !n.Ready {
			return NotReady, fmt.Errorf("%s is not ready", n.Name)
		}
	}
	return Ready, nil
}

func (s *Status) askAPI(dir layout.Dir) error {
	cfg, err := clientcmd.BuildConfigFromFlags("", dir.Kubeconfig())
	if err != nil {
		return err
	}
	cfg.Timeout = 3 * time.Second
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	nodes, err := client.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	pods, err := client.CoreV1().Pods("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range nodes.Items {
		status := NodeStatus{Name: n.Name}
		for _, c := range n.Status.Conditions {
			status.Ready = status.Ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}
		for _, p := range pods.Items {
			if p.Spec.NodeName == n.Name && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
				status.Pods++
			}
		}
		s.Nodes = append(s.Nodes, status)
	}
	return nil
}

// componentsOf finds the children of the cluster's pid 1 by the pid files, which hold pids as seen inside.
func componentsOf(dir layout.Dir, inner int) (out []ComponentStatus, err error) {
	outside, err := childrenOf(inner)
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(dir.PID("*"))
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		c := ComponentStatus{Name: strings.TrimSuffix(filepath.Base(f), ".pid")}
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		if pid, ok := outside[strings.TrimSpace(string(text))]; ok {
			c.PID = &pid
		}
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b ComponentStatus) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// childrenOf maps pids as seen inside a process namespace to those seen here, for the children of its pid 1.
func childrenOf(inner int) (map[string]int, error) {
	out := map[string]int{}
	files, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // it has ended
		}
		parent, pids := parseProcStatus(string(text))
		if parent == inner && len(pids) > 1 {
			pid, err := strconv.Atoi(pids[0])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", f, err)
			}
			out[pids[len(pids)-1]] = pid
		}
	}
	return out, nil
}

// parseProcStatus finds a process's parent, and its pid in each namespace from this one inwards.
func parseProcStatus(text string) (parent int, pids []string) {
	for _, line := range strings.Split(text, "\n") {
		if v, ok := strings.CutPrefix(line, "PPid:"); ok {
			parent, _ = strconv.Atoi(strings.TrimSpace(v)) // 0: nobody's child
		}
		if v, ok := strings.CutPrefix(line, "NSpid:"); ok {
			pids = strings.Fields(v)
		}
	}
	return parent, pids
}

// Print writes the status for people.
func (s Status) Print(w io.Writer) {
	fmt.Fprintf(w, "%s: %s\n", s.Directory, s.Health)
	if s.Problem != "" {
		fmt.Fprintf(w, "problem     %s\n", s.Problem)
	}
	if s.Supervisor == 0 {
		return
	}
	fmt.Fprintf(w, "api         %s\n", s.API)
	if s.Kubeconfig != "" {
		fmt.Fprintf(w, "kubeconfig  %s\n", s.Kubeconfig)
	}
	fmt.Fprintf(w, "since       %s\n", s.Since.Format(time.RFC3339))
	fmt.Fprintf(w, "%-12d supervisor\n", s.Supervisor)
	for _, c := range s.Components {
		pid := "down"
		if c.PID != nil {
			pid = strconv.Itoa(*c.PID)
		}
		fmt.Fprintf(w, "%-12s %s\n", pid, c.Name)
	}
	for _, n := range s.Nodes {
		ready := "not ready"
		if n.Ready {
			ready = "ready"
		}
		fmt.Fprintf(w, "%-12s %s, %d pods\n", n.Name, ready, n.Pods)
	}
}

// JSON writes the status for programs.
func (s Status) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(s)
}
